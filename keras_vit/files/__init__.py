"""Files and what is written into them: npz, safetensors, lazy arrays, tables. The bottom room, used by all."""
