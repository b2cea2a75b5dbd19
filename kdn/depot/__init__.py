"""A data folder without HTTP: its stores, its names, whose keys are whose. A node serves one."""
