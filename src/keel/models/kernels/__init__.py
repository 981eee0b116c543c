"""C code for CPUs, compiled at first use by the compiler of the machine."""
