"""The pages of `keel view`."""
