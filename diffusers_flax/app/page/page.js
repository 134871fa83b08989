() => {
    const narrow = () => window.innerWidth < 700;
    // Escape cancels the request, as the button does.
    document.addEventListener("keydown", (event) => {
        const button = document.querySelector("#cancel");
        if (event.key === "Escape" && button && button.offsetParent) button.click();
    });
    // On a phone the result is below the button.
    document.addEventListener("click", (event) => {
        if (event.target.closest("#run") && narrow()) {
            document.querySelector("#results").scrollIntoView({ behavior: "smooth" });
        }
    });
    // The brush starts a stroke only if the pointer's last movement was over the image. One is
    // added, so that a stroke may start in the margin.
    document.addEventListener("pointerdown", (event) => {
        if (!event.target.closest("#mask canvas")) return;
        const { left, top, width, height } = event.target.getBoundingClientRect();
        const middle = { clientX: left + width / 2, clientY: top + height / 2 };
        const { pointerId, pointerType, isPrimary } = event;
        const options = { ...middle, pointerId, pointerType, isPrimary, bubbles: true };
        event.target.dispatchEvent(new PointerEvent("pointermove", options));
    }, true);
    // The browser asks before it reloads or leaves a page with an image or a running request.
    window.addEventListener("beforeunload", (event) => {
        const kept = [...document.querySelectorAll("#image img, #gallery img, #cancel")];
        if (kept.some((element) => element.offsetParent)) event.preventDefault();
    });
}
