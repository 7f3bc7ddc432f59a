"""The Hugging Face hub, and the families of transformers beside ViT and DeiT: their keys and their config.json."""
