"""Training frameworks on offloaded models. Each file needs the package that it is named after."""
