"""`distill serve`: a teacher behind HTTP, for trainers elsewhere. The wire is `distill.teachers.server.wire`."""
