"""What strings stages together, and looks at them before they run."""
