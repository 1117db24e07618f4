"""Reading profiler traces: from bytes to lanes, steps, buckets and arrivals, and to the same StepReport."""
