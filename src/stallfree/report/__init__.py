"""What was measured, as text and as pages. Knows plain data only, the JSON of a report or a simulation."""
