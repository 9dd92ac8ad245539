"""Getting models in and out: safetensors, and snapshots of the store."""
