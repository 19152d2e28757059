"""`dpopt gpu`: everything about the project that only a device can show, in slices of some minutes."""
