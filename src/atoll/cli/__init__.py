"""The commands of the product. `atoll.app` puts them together with those of the instruments."""
