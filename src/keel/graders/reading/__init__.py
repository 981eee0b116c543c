"""The words, signs and calculations that answers are made of."""
