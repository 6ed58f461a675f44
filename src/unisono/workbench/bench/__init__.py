"""Measure operations and stores beside other libraries, on the same arrays, in the same run."""
