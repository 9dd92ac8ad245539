"""Units, the parameters that move together, and their bytes at rest."""
