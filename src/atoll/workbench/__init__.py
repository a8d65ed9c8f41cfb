"""The commands of the instruments. `atoll.app` puts them together with those of the product."""
