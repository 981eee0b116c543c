"""The kinds of stages, one a module; `keel.config.entry` finds them here."""
