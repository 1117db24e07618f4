"""The schedule chosen from measurements, and the step at any number of ranks."""
