// The theme leaves its search dialog without a name.
document.querySelector('[data-md-component="search"][role="dialog"]')?.setAttribute("aria-label", "Search");
