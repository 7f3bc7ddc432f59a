"""The families of transformers beside ViT and DeiT: their keys and their config.json."""
