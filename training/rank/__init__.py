"""The torch line: only files in here import torch, transformers, peft or deepspeed."""
