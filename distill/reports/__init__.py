"""What is handed over: the report, its curves, the model card, the exported student."""
