"""JPEG files like photographs, the same in every process."""

import io

import numpy as np


def photographs(count: int) -> list[bytes]:
    """Smooth random images of 500x375 with noise. Compressed, they are as large as photographs (about 60 kB)."""
    from PIL import Image

    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.float32)
        noisy = np.clip(smooth + rng.normal(0.0, 6.0, smooth.shape), 0.0, 255.0).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(noisy).save(stream, "JPEG", quality=90)
        files.append(stream.getvalue())
    return files
