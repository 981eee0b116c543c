"""What runs several runs."""
