"""Pure drawing: a view goes in, lines of (text, style name) come out. No App is needed."""
