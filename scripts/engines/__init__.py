"""Real engines for tests: vLLM and llama.cpp, each in an environment of its own."""
