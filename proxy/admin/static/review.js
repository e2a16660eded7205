// Keys of the review page: each element with data-key is used by that key while no field has the focus.
"use strict";
(() => {
  const use = (element) => {
    if (element.matches("button, a")) element.click();
    else element.focus();
  };

  document.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    const field = event.target.closest("input, textarea, select");
    if (field !== null) {
      if (event.key === "Escape") field.blur();
      const sends = field.dataset.sends;
      const ends = field.matches("textarea") ? event.ctrlKey || event.metaKey : true;
      if (event.key === "Enter" && sends && ends) {
        // Without this the form would be sent by its first button, a thumb.
        event.preventDefault();
        field.form.requestSubmit(field.form.querySelector(`button[value="${sends}"]`));
      }
      // A letter in a list chooses an entry; the ratings that follow a choice work from the list all the same.
      if (!field.matches("select") || !["b", "w"].includes(event.key)) return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    const element = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    if (element === null) return;
    event.preventDefault();
    use(element);
  });
})();
