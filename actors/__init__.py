"""What runs as a Ray actor, and the handle side of it."""
