"""The user's model before, while and after it is offloaded."""
