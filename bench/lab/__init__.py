"""What reproduces papers and measures for the project's own pages: run from the repository, not part of the wheel."""
