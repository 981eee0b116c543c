"""The kinds of stages, one a module; `keel.config.stage` finds them here."""
