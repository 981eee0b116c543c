"""From a configuration of TRL, verl or OpenRLHF to a recipe."""
