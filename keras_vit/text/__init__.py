"""The texts of two-tower checkpoints (CLIP, OpenCLIP, SigLIP, SigLIP 2): text towers, tokenizers, zero-shot heads."""
