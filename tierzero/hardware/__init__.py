"""What the machine is and can do: drives, memory, control groups, measured rates."""
