"""Several teachers of which each teaches rows of its own, such as one a domain."""
