"""Moving trainer weights to the engines, with proof."""
