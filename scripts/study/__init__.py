"""Does distillation help, and which objective helps most? Many small runs under equal conditions, judged alike."""
