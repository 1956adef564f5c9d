"""GGUF files of every architecture that llama.cpp converts: its converter lays them out, our rows replace its rows."""
