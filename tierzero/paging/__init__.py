"""What moves and in which order: residency within the budget, transfers, the queue of updates."""
