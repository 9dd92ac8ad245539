"""What autograd and module hooks tell the engine, and what they make it do: when things move."""
