"""Objectives: the formats of a teacher's targets, and the losses that take them."""
