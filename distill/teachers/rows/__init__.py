"""Rows: which tokens the teacher reads for a row of the student."""
