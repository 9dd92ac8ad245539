"""The streamed optimizer: AdamW over state records, and exact gradient clipping."""
