"""The operating system: processes, time limits, HTTP, SQLite, files, signals and the sandbox."""
