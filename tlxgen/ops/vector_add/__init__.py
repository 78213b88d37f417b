"""out = x + y: the smallest operator, and the worked example of how one is added."""
