"""Few widgets, each one picture, drawn line by line from what `render` returns."""
