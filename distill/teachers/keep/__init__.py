"""A teacher whose answers are stored as they are first given, and read from then on."""
