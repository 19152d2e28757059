"""A suite is a pure function to cells: a YAML file -> rows -> cells. Loading one imports no torch."""
