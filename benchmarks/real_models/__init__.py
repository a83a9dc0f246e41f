"""What trained public models lose to each compression, and what they gain in speed."""
