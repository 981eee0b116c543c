"""`keel check`: inspects a recipe before it runs."""
