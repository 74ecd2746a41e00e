"""Small trainings that show what the blocks can and cannot do; `mambakit experiment` runs them."""
