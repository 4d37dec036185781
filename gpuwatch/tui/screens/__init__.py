"""The screens: each lays out its panes and feeds them when it is the one on top."""
