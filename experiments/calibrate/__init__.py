"""Step times of the engine, and the cost model that fits them."""
