"""What the HTML pages of all commands share: template, style, colours, figures."""
