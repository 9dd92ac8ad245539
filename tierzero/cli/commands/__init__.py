"""What each command takes and says about itself. Nothing heavy is imported before a command runs."""
